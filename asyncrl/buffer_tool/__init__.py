"""`asyncrl buffer`: looks into stored trajectories, exports them, trains from them."""
