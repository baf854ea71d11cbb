"""State that all instances share: a replicated map of adapters and of what each instance advertises."""
