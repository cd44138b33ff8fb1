"""What experiments came to, for people: the page, and two runs held against each other."""
