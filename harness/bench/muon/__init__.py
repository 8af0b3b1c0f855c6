"""What a step of sharded Muon costs, against unsharded Muon and the original owner rule."""
