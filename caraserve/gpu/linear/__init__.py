"""Linear modules: `base` is the interface, and `formats` names the class of each weight format, which has a file."""
