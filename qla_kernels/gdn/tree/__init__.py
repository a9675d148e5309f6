"""The gated delta rule over prefix trees: a node starts from the state in which its parent ends."""
