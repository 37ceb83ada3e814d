"""What is asked of each command: a record of its options, for help and completion as well."""
