// A browser that does what lines of JSON on standard input say: {"do": NAME, ...}. A line of JSON answers each.
import { createInterface } from "node:readline";
import { createRequire } from "node:module";

const require = createRequire(new URL("../../player/package.json", import.meta.url));
const { chromium } = require("playwright-core");
const axe = require.resolve("axe-core/axe.min.js");
const browser = await chromium.launch({
  executablePath: process.argv[2],
  args: ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"],
});
let context = null;
let page = null;
let complaints = [];

async function open({ path, hash = "", width = 1200, height = 900, dark = false, still = false, touch = false }) {
  await context?.close();
  context = await browser.newContext({
    viewport: { width, height },
    colorScheme: dark ? "dark" : "light",
    reducedMotion: still ? "reduce" : "no-preference",
    hasTouch: touch,
  });
  page = await context.newPage();
  complaints = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) complaints.push(message.text());
  });
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("request", (request) => {
    if (!/^(file|data|blob):/.test(request.url())) complaints.push(`asks for ${request.url()}`);
  });
  const begin = performance.now();
  await page.goto(`file://${path}${hash}`);
  await page.waitForSelector("body[data-ready]", { timeout: 30000 });
  return performance.now() - begin;
}

const deeds = {
  open,
  complaints: () => complaints,
  click: ({ on }) => page.click(on),
  tap: ({ on }) => page.tap(on),
  press: ({ key }) => page.keyboard.press(key),
  select: ({ on, value }) => page.selectOption(on, value),
  // A range has no text to type: its value is set, as dragging does.
  slide: ({ on, value }) =>
    page.$eval(on, (input, to) => {
      input.value = to;
      input.dispatchEvent(new Event("input", { bubbles: true }));
    }, value),
  text: ({ on }) => page.textContent(on),
  texts: ({ on }) => page.$$eval(on, (nodes) => nodes.map((node) => node.textContent)),
  count: ({ on }) => page.$$eval(on, (nodes) => nodes.length),
  visible: ({ on }) => page.isVisible(on),
  value: ({ on }) => page.$eval(on, (node) => node.value),
  attribute: ({ on, name }) => page.getAttribute(on, name),
  focused: () => page.evaluate(() => document.activeElement.id || document.activeElement.tagName),
  evaluate: ({ code }) => page.evaluate(code),
  pointer: async ({ on, x, y, drag = null }) => {
    const node = await page.$(on);
    await node.scrollIntoViewIfNeeded();
    const box = await node.boundingBox();
    await page.mouse.move(box.x + x, box.y + y);
    if (drag === null) return;
    await page.mouse.down();
    await page.mouse.move(box.x + x + drag, box.y + y, { steps: 4 });
    await page.mouse.up();
  },
  wait: ({ code }) => page.waitForFunction(code, null, { timeout: 20000 }).then(() => true),
  screenshot: ({ path, whole = true }) => page.screenshot({ path, fullPage: whole }).then(() => true),
  axe: async () => {
    await page.addScriptTag({ path: axe });
    const { violations } = await page.evaluate(() => window.axe.run());
    return violations.map(({ id, impact, nodes }) => [id, impact, nodes[0].html]);
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { do: name, ...rest } = JSON.parse(line);
  let answer;
  try {
    answer = { value: (await deeds[name](rest)) ?? null };
  } catch (error) {
    answer = { error: String(error) };
  }
  process.stdout.write(JSON.stringify(answer) + "\n");
}
await browser.close();
