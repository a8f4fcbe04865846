"""``hotrow train`` in this process."""

from serving.cli.main import main


def hotrow_train(arguments):
    """Run the command, and return its exit code."""
    return main(["train", *arguments])
