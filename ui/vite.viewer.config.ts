// Build of the viewer: one page that holds its script and styles, and lets nothing else in. `cray-agents export
// --format html` puts runs behind it, so it ends within its body.
import { createHash } from "node:crypto";
import { defineConfig, type Plugin } from "vite";

const POLICY = [
  "default-src 'none'",
  "script-src SCRIPT",
  "style-src STYLE",
  "img-src data:",
  "base-uri 'none'",
  "form-action 'none'",
  "require-trusted-types-for 'script'",
  "trusted-types 'none'",
].join("; ");

function hash(text: string): string {
  return `'sha256-${createHash("sha256").update(text).digest("base64")}'`;
}

function oneFile(): Plugin {
  return {
    name: "one-file",
    enforce: "post",
    generateBundle(_, bundle) {
      const files = Object.values(bundle);
      const page = files.find((one) => one.fileName === "viewer.html");
      const scripts = files.filter((one) => one.type === "chunk");
      const styles = files.filter((one) => one.fileName.endsWith(".css"));
      if (page?.type !== "asset" || scripts.length !== 1 || styles.length !== 1 || files.length !== 3) {
        throw new Error(`the viewer is not one page, script and style, but ${files.map((one) => one.fileName)}`);
      }
      const [script, style] = [scripts[0], styles[0]];
      if (script?.type !== "chunk" || style?.type !== "asset") throw new Error("no script or style");
      const code = script.code.trim();
      const css = String(style.source).trim();
      if (/<\/script|<!--/i.test(code) || /<\/style/i.test(css)) throw new Error("the code would end its own element");
      page.source = String(page.source)
        .replace("POLICY", POLICY.replace("SCRIPT", hash(code)).replace("STYLE", hash(css)))
        .replace(/<script type="module"[^>]*><\/script>/, () => `<script type="module">${code}</script>`)
        .replace(/<link rel="stylesheet"[^>]*>/, () => `<style>${css}</style>`)
        .replace(/\s*<\/body>\s*<\/html>\s*$/, "\n");
      delete bundle[script.fileName];
      delete bundle[style.fileName];
    },
  };
}

export default defineConfig({
  base: "./",
  esbuild: undefined,
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  plugins: [oneFile()],
  build: {
    outDir: "../runtime/dashboard/static",
    emptyOutDir: false,
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    target: "es2022",
    modulePreload: false,
    reportCompressedSize: false,
    rolldownOptions: { input: "viewer.html", output: { codeSplitting: false } },
  },
});
