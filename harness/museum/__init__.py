"""The verb ``museum``: a campaign over every planted bug and every right variant, and a score."""
