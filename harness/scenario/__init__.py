"""What is run: the scenario, its values, its layout arithmetic, and where scenarios come from."""
