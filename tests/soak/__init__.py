"""Random cases over the whole public surface, as long as one likes: ``python -m tests.soak --minutes 10 --seed 1``."""
