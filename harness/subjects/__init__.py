"""What can be verified: built-in systems, and classes of the user's."""
