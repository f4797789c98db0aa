"""The recurrence in Triton kernels, imported on first use.

Operands of every product have the compile-time type `DOT`: bfloat16 on a GPU, float32 in Triton's
interpreter, whose bfloat16 products are wrong. Sums, gates, norms and states are float32.
"""

from atlas_lm.ops.triton.assembler import choose_assembler

choose_assembler()
