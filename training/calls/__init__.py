"""What the front ends of several frameworks share: checks of arguments, and the files that they write."""
