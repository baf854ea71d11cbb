"""State that all instances share: a replicated map of adapters and settings, and of what each instance advertises."""
