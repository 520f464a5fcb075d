"""The problems that `python -m bsrgemm bench` and `profile` know."""
