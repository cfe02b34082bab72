"""Tests of native kernels, where there are any."""

import pytest

from vlmserve.kernels.extension import supported_isas

built = pytest.mark.skipif(not supported_isas(), reason="the native kernels were not built: no C++ compiler")
