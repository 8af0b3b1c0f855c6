"""The rank's side of a campaign: drive one scenario through a subject, beside the reference, and report a verdict."""
