"""``doctor``: checks of machines, the object through which they see one, and how findings are
told.
"""

from __future__ import annotations
