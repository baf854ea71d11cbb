"""Made-up decoders, and what every backend must compute for a plan."""
