"""Tests of `bsrgemm.linalg`."""
