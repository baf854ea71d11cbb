"""Real fleets on one machine, each instance with its share of a core, and their simulation."""
