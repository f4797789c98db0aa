"""The correctness contract, for the rules, layers and models of this library and for yours.

    check_rule(Rule(network=my_network, objective=my_loss))
    check_stream(MyLayer(), torch.randn(2, 70, 32, dtype=torch.float64))

Everything in float64 on the CPU, values and gradients; a failure says what differs and by how much.
"""

from atlas_lm.testing.rules import (
    Example,
    assert_close,
    check_agreement,
    check_causal,
    check_cuts,
    check_gradients,
    check_padding,
    check_rows_alone,
    check_rule,
    evaluate,
    example,
)
from atlas_lm.testing.streams import check_stream

__all__ = [
    "Example",
    "assert_close",
    "check_agreement",
    "check_causal",
    "check_cuts",
    "check_gradients",
    "check_padding",
    "check_rows_alone",
    "check_rule",
    "check_stream",
    "evaluate",
    "example",
]
