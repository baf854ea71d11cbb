"""The forward pass on a GPU: batches, the decoder, captured graphs."""
