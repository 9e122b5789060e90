"""Routes for those who run the server."""
