"""What a scenario costs: as the harness runs it, against its own calls run bare on the same ranks."""
