// Build of the dashboard: relative addresses, so that it also works behind a proxy's prefix. Nothing is inlined:
// the page's policy allows no data: scripts.
import { defineConfig } from "vite";

export default defineConfig({
  base: "./",
  esbuild: undefined,
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: "../runtime/dashboard/static",
    emptyOutDir: true,
    assetsDir: "assets",
    assetsInlineLimit: 0,
    target: "es2022",
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
});
