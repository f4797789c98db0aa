"""The operation for compiled models: called between their graphs, never traced.

It cuts rows by numbers it has to look at. Imported only while `torch.compile` traces a layer, since
the compiler takes a second to import.
"""

import torch

from atlas_lm.ops import memorize as _memorize

memorize = torch.compiler.disable(_memorize)
