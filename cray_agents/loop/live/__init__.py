"""The same loop on live traffic: which runs count, when it trains, a canary as the judge."""
