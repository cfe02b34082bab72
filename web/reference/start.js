// The document is relative to this page, so that both work behind a proxy that adds a path.
SwaggerUIBundle({
  url: "./openapi.json",
  dom_id: "#reference",
  deepLinking: true,
  docExpansion: "list",
  validatorUrl: null,
  displayRequestDuration: true,
});
