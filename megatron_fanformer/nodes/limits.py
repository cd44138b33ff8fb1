"""Time limits of the measurement of links; imports nothing."""

LINK_SECONDS = 30.0  # for a pair of nodes to meet, for its group to be made, and for a collective
ROUND_SECONDS = 3 * LINK_SECONDS  # how late a link may end
ROUNDS = 3  # at most: with an odd number of nodes
LINKS_SECONDS = ROUNDS * ROUND_SECONDS + LINK_SECONDS  # for all links of a node together; nodes do not begin at once
