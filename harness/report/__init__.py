"""What is said about a campaign: the result, its JSON, its text. No torch."""
