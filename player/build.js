// Bundle src/ into one page without network, ringcoll/lab/pictures/player.html, or into the file that is named.
// The library puts a title and data in place of the two marks.
import { build } from "esbuild";
import { readFile, writeFile } from "node:fs/promises";

const here = new URL(".", import.meta.url);
const target = process.argv[2] ?? new URL("../ringcoll/lab/pictures/player.html", here);
const bundled = await build({
  entryPoints: [new URL("src/main.ts", here).pathname],
  bundle: true,
  minify: true,
  charset: "utf8",
  format: "iife",
  legalComments: "none",
  target: "es2022",
  write: false,
});
const page = await readFile(new URL("src/page.html", here), "utf8");
const style = await readFile(new URL("src/style.css", here), "utf8");
const script = bundled.outputFiles[0].text.trim().replaceAll("</script", "<\\/script");
// Functions, as a replacement text has signs of its own.
await writeFile(
  target,
  page.replace("/* style */", () => style.trim()).replace("/* script */", () => script),
);
