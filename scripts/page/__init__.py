"""The parts of scripts/page_check: a browser that is driven, servers that it uses, and what is looked at."""
