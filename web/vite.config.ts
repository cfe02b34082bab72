import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative, resolve, sep } from "node:path";
import react from "@vitejs/plugin-react";
import { defineConfig, type Plugin } from "vite";

const here = import.meta.dirname;
const built = resolve(here, "../src/vlmserve/server/page/built");

/** All that a build depends on; tests/server/test_page.py reads the same files. */
function sources(): string[] {
  const inside = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
    .filter((entry) => entry.isFile())
    .map((entry) => relative(here, join(entry.parentPath, entry.name)).split(sep).join("/"));
  const reference = readdirSync(join(here, "reference")).map((name) => `reference/${name}`);
  return [...inside, ...reference, "index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"].sort();
}

/** Copies the API reference: Swagger UI and the files that start it. */
function reference(): Plugin {
  return {
    name: "reference",
    closeBundle() {
      const target = join(built, "reference");
      mkdirSync(target, { recursive: true });
      for (const name of ["index.html", "start.js"]) copyFileSync(join(here, "reference", name), join(target, name));
      const swagger = join(here, "node_modules/swagger-ui-dist");
      for (const name of ["swagger-ui-bundle.js", "swagger-ui-bundle.js.LICENSE.txt", "swagger-ui.css", "LICENSE", "NOTICE"])
        copyFileSync(join(swagger, name), join(target, name));
    },
  };
}

/** Leaves out fonts for browsers older than all that this page runs in. */
function newFontsOnly(): Plugin {
  return {
    name: "new-fonts-only",
    enforce: "pre",
    transform(code, id) {
      if (id.endsWith("katex.min.css")) return { code: code.replace(/,url\([^)]*\.(?:woff|ttf)\) format\("[a-z]+"\)/g, ""), map: null };
    },
  };
}

/** Writes each licence once, below the names of all packages that have it. */
function licencesOnce(): Plugin {
  return {
    name: "licences-once",
    closeBundle() {
      const file = join(built, "licences.md");
      const [head, ...sections] = readFileSync(file, "utf-8").split(/^(?=## )/m);
      const names = new Map<string, string[]>();
      for (const section of sections) {
        const [name = "", ...text] = section.split("\n");
        const licence = text.join("\n").trim();
        names.set(licence, [...(names.get(licence) ?? []), name]);
      }
      writeFileSync(file, `${head}${[...names].map(([licence, own]) => `${own.join("\n\n")}\n\n${licence}\n`).join("\n")}`);
    },
  };
}

/** Writes which sources the built files belong to. */
function digest(): Plugin {
  return {
    name: "digest-of-sources",
    closeBundle() {
      const hash = createHash("sha256");
      for (const name of sources()) hash.update(`${name}\0`).update(readFileSync(join(here, name))).update("\0");
      writeFileSync(join(built, "sources.sha256"), `${hash.digest("hex")}\n`);
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [react(), newFontsOnly(), reference(), licencesOnce(), digest()],
  build: {
    outDir: built,
    emptyOutDir: true,
    license: { fileName: "licences.md" },
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
  },
  server: { proxy: { "/v1": "http://127.0.0.1:8000", "/live": "http://127.0.0.1:8000", "/ready": "http://127.0.0.1:8000" } },
});
