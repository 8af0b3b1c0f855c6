"""What a verifier must make of each plant: one module of labels for each module of ``plants``. No torch."""
