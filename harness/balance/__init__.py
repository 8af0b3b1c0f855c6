"""How evenly the matrices of real models are dealt out to ranks, by each owner rule; nothing is run."""
