"""The statistics of promotion: a paired sequential test, and the bets it is made of."""
