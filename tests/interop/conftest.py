"""What pytest must not import: to import the programs of ranks is to start MPI in the process of the tests."""

collect_ignore = ["mpi_programs.py"]
