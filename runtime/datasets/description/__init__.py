"""Description: counts of a build, and the card, figures and Croissant file made of them."""
