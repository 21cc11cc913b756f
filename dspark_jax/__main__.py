"""`python -m dspark_jax <command>`."""

from dspark_jax.commands.cli import main

if __name__ == "__main__":
    main()
