"""Models in GGUF files: a file, or several parts of one, with configuration, tokenizer and tensors.

The metadata become a configuration as Hugging Face has it (`config.py`), which a family turns into a plan; `plan.py`
gives the plan what only the file knows: names, formats and biases. `reader.py` reads tensors.
"""
