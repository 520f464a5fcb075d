"""No fault of the cache folder makes a foreign kernel run, and every fault ends in a kernel that works.

Foreign files hold a valid kernel that computes something else, under the name that an entry with these contents has:
the strongest that someone can put there who knows how the cache works.
"""
