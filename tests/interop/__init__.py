"""Tests of `bsrgemm.interop`."""
