"""Limits of the grammars that clients choose."""

import llguidance

MAX_SOURCE_BYTES = 256 << 10
COMPILE_CPU_S = 1.0  # then the checking process ends
ANSWER_S = 30.0  # until a grammar must have been compiled, on a machine that is busy
FIRST_MASK_CPU_S = 0.02  # for one of the first tokens: all requests of an iteration wait for it
MAX_GRAMMAR_BYTES = 24 << 20  # that a compiled grammar takes
MAX_PROCESS_BYTES = 256 << 20  # that compiling one may take
# A matcher of a shared grammar adds to its lexer's states, of which there is a limit: after so many answers it is
# compiled again, in some ms.
MAX_ANSWERS = 200
# Between the tokens of JSON: a space, or a line with its indentation. Without a bound, a weak model writes spaces until
# `max_tokens`: 40 of 1,000 answers of the demo model never ended.
WHITESPACE = r" ?(\n[ \t]{0,32})?"
# Answers also make a grammar take more memory. Above the first limit they fail if its client has no memory left. Above
# the second it is compiled again for the next ones, whose masks then take longer. Above the third they fail.
FREE_GROWTH_BYTES = 8 << 20
WORN_BYTES = 32 << 20
MAX_GROWN_BYTES = 64 << 20
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2_000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=25_000,
    max_lexer_states=50_000,
    max_grammar_size=10_000,
    verbose_errors=False,
)
