"""Does a user's own recipe survive? Its runs are killed in many ways, and must end the same."""
