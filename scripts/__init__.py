"""Scripts of the repository, and the laboratory that some of them run; the installed package has none of these."""
