"""CaraServe: one endpoint for one base model and thousands of LoRA adapters."""

__version__ = "0.2.0"
