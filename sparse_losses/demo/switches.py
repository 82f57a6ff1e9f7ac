"""What can be switched off, and how long a run takes; the help text needs these without torch."""

TERMS = ("info_nce", "flops", "min_activation", "self_reconstruction", "positive_activation")
INGREDIENTS = ("special_penalty", "stopword_penalty", "idf", "warmup", "spelling")
SWITCHES = (*TERMS, *INGREDIENTS)
STEPS = 500
