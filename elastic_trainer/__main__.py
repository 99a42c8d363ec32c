"""`python -m elastic_trainer`: the same as the command `elastic-trainer`."""

from elastic_trainer.cli import main

if __name__ == "__main__":
    main()
