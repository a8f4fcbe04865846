"""The ``hotrow`` command, one file per subcommand."""
