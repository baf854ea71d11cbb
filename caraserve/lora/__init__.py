"""LoRA adapters: reading PEFT folders, names and digests, host and device caches."""
