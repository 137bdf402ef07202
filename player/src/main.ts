/** Controls, the clock, keyboard: what the user sets becomes a State, and a State is drawn. */
import { Cables, shareInWords } from "./cables";
import { Chunks, FEW_STRIPES } from "./chunks";
import { Curves } from "./curves";
import type { PageData, SceneData } from "./data";
import { Film } from "./film";
import { Network } from "./network";
import { INITIAL, read, write, type Limits, type State } from "./state";
import { Timeline, type Lane } from "./timeline";
import { modelled, recorded, type Costs, type Timing } from "./timing";
import { bytes, cellInWords, plural, seconds, stepInWords, troubleInWords } from "./words";

const STEP_SECONDS = 1.6; // that a step takes, as in the moving picture
const WHOLE_SECONDS = 12; // that a run takes on the clock of time

let page: PageData;
let initial: State;
let state: State;
let limits: Limits;
let isPlaying = false;
let speed = 1;

function element<Type extends HTMLElement>(id: string): Type {
  return document.getElementById(id) as Type;
}

/** All that is drawn of one schedule. */
class Stage {
  private film: Film;
  private network!: Network;
  private chunks!: Chunks;
  private timeline!: Timeline;
  private cables: Cables | null = null;
  private fault = 0;
  timing!: Timing;
  private lanes: Lane[] = [];
  private readonly parts: Record<"network" | "chunks" | "timeline", HTMLElement>;
  private readonly text: HTMLElement;
  private readonly proof: HTMLElement;

  constructor(
    private readonly scene: SceneData,
    private readonly number: number,
  ) {
    const section = element("stages").appendChild(document.createElement("section"));
    section.setAttribute("aria-labelledby", `stage${number}`);
    const add = (tag: string, className: string, parent: HTMLElement = section): HTMLElement => {
      const added = parent.appendChild(document.createElement(tag));
      added.className = className;
      return added;
    };
    const head = add("h2", "");
    head.id = `stage${number}`;
    head.textContent = `${scene.name} ${scene.collective}, ${plural(scene.worldSize, "rank")}`;
    this.proof = add("p", "proof");
    this.text = add("p", "step");
    if (number === 0) this.text.setAttribute("aria-live", "polite");
    const both = add("div", "both");
    const network = add("div", "network", both);
    const chunks = add("div", "chunks", both);
    add("p", "key", chunks).textContent =
      scene.complete === 1
        ? "What each rank holds (a row): each chunk in the colour of the rank it came from."
        : scene.worldSize > FEW_STRIPES
          ? "What each rank holds (a row): each chunk filled as far as ranks' data are in it."
          : "What each rank holds (a row): in each chunk, a stripe for each rank whose data are in it.";
    const cells = add("div", "cells", chunks);
    const timeline = add("div", "timeline");
    this.parts = { network, chunks: cells, timeline };
    this.film = this.show(0);
  }

  /** Show the schedule, or one with a fault. */
  private show(fault: number): Film {
    this.fault = fault;
    const changed = fault > 0 ? page.faults[fault - 1] : undefined;
    this.film = new Film(changed ? { ...this.scene, ...changed } : this.scene);
    for (const part of Object.values(this.parts)) part.replaceChildren();
    this.network = new Network(this.film, this.parts.network, `s${this.number}`);
    this.chunks = new Chunks(this.film, this.parts.chunks, (rank, chunk) => {
      if (state.scene === this.number && state.rank === rank && state.chunk === chunk) return;
      change({ scene: this.number, rank, chunk });
    });
    if (this.number === 0 && page.network !== null) {
      element("cables").replaceChildren();
      this.cables = new Cables(page.network, this.film, element("cables"));
    }
    this.timeline = new Timeline(this.film, this.parts.timeline, (time) => {
      stop();
      change({ clock: "time", at: time });
    });
    this.proof.textContent = this.film.scene.proof;
    this.proof.classList.toggle("wrong", this.film.scene.failure !== null);
    return this.film;
  }

  get numSteps(): number {
    return this.film.numSteps;
  }

  /** Take over costs and faults; what is drawn of time is drawn by `plot`. */
  prepare(costs: Costs): void {
    const fault = this.number === 0 ? Math.min(state.fault, page.faults.length) : 0;
    if (fault !== this.fault) this.show(fault);
    const model = modelled(this.film, costs, state);
    const trace = this.number === 0 && this.fault === 0 ? page.times : null;
    const measured = trace && recorded(this.film, trace);
    this.timing = measured && state.times === "trace" ? measured : model;
    this.lanes = [{ timing: model, title: "model" }];
    if (measured && trace) this.lanes.push({ timing: measured, title: trace.title });
  }

  get longest(): number {
    return Math.max(...this.lanes.map(({ timing }) => timing.total));
  }

  plot(total: number): void {
    this.timeline.draw(this.lanes, total);
  }

  /** Draw a moment. */
  draw(look: string): void {
    const { step, fractions, after } = state.clock === "steps" ? this.atStep() : this.atTime();
    const { failure } = this.film.scene;
    const isAtFailure = failure !== null && after.some((count) => count >= this.numSteps);
    const messages = state.clock === "steps" ? (this.film.steps[step] ?? []) : this.film.steps.flat();
    const isDead = state.dead >= 0 && (state.clock === "time" ? after[state.dead]! : step) >= state.deadStep;
    this.network.draw(step, messages, fractions, after, {
      bad: isAtFailure ? failure.rank : null,
      dead: isDead ? state.dead : null,
    });
    this.cables?.draw(step, messages.filter((_, index) => !Number.isNaN(fractions[index]!)));
    const isSelected = state.scene === this.number && state.rank >= 0;
    this.chunks.draw(after, isSelected ? state.rank : -1, isSelected ? state.chunk : -1, look);
    this.timeline.point(state.clock === "time" ? state.at : this.timeOf(state.at));
    const words = stepInWords(this.film, step, this.timing);
    if (this.text.textContent !== words) this.text.textContent = words;
    if (isSelected) {
      element("cell").textContent =
        state.rank < this.scene.worldSize && state.chunk < this.scene.numChunks
          ? cellInWords(this.film, state.rank, state.chunk, after[state.rank]!)
          : "";
    }
  }

  trouble(): string {
    const words = troubleInWords(this.film, this.timing, state.slow, state.dead);
    return words && page.scenes.length > 1 ? `${this.scene.name}: ${words}` : words;
  }

  private atStep(): { step: number; fractions: number[]; after: number[] } {
    const step = Math.min(Math.floor(state.at + 1e-9), this.numSteps);
    const fraction = Math.max(0, state.at - step);
    const begins = this.timing.begin[step] ?? [];
    const fractions = begins.map((begin) => (Number.isFinite(begin) ? fraction : NaN));
    const after = this.film.scene.places.map((_, rank) => Math.min(step, this.reached(rank, step)));
    return { step, fractions, after };
  }

  /** Steps that a rank ends at all, of its first ones: fewer than asked for beside a rank that has ended. */
  private reached(rank: number, steps: number): number {
    let count = steps;
    while (count > 0 && !Number.isFinite(this.timing.ends[count - 1]![rank]!)) count--;
    return count;
  }

  private atTime(): { step: number; fractions: number[]; after: number[] } {
    const { begin, end, ends } = this.timing;
    const fractions = begin.flatMap((begins, step) =>
      begins.map((from, index) => {
        const to = end[step]![index]!;
        if (!(from <= state.at && state.at < to)) return NaN;
        return (state.at - from) / (to - from);
      }),
    );
    const time = state.at + 1e-15;
    const after = this.film.scene.places.map((_, rank) => {
      let count = 0;
      while (count < ends.length && ends[count]![rank]! <= time) count++;
      return count;
    });
    return { step: Math.min(...after), fractions, after };
  }

  private timeOf(steps: number): number {
    const whole = Math.floor(steps);
    const ended = (count: number): number =>
      count <= 0 ? 0 : Math.max(0, ...(this.timing.ends[Math.min(count, this.numSteps) - 1] ?? []).filter(Number.isFinite));
    return ended(whole) + (steps - whole) * (ended(whole + 1) - ended(whole));
  }
}

let stages: Stage[] = [];
let curves: Curves | null = null;
let length = 1;
let look = "";

function costsOf({ alpha, bandwidth, reduction, nbytes }: State): Costs {
  return { alpha: alpha * 1e-6, beta: 1e-9 / bandwidth, gamma: 1e-9 / reduction, nbytes };
}

/** Draw all that depends on costs, faults and the size of the window. */
function prepare(): void {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  look = `${dark} ${window.innerWidth}`;
  const costs = costsOf(state);
  stages.forEach((stage) => stage.prepare(costs));
  const total = Math.max(...stages.map(({ longest }) => longest));
  stages.forEach((stage) => stage.plot(total));
  length =
    state.clock === "steps"
      ? Math.max(...stages.map(({ numSteps }) => numSteps))
      : Math.max(...stages.map(({ timing }) => timing.total));
  state.at = Math.max(0, Math.min(state.at, length));
  const found = curves?.draw(costs) ?? [];
  element("crossings").textContent = found
    .map(({ size, before, after }) => `From ${bytes(size)} on ${after} is faster than ${before}.`)
    .join(" ");
  element("trouble").textContent = stages.map((stage) => stage.trouble()).filter((words) => words).join("\n");
  showControls();
  draw();
}

function draw(): void {
  stages.forEach((stage) => stage.draw(look));
  const scrub = element<HTMLInputElement>("scrub");
  const share = length > 0 ? (1000 * state.at) / length : 0;
  scrub.value = String(share);
  const said =
    state.clock === "steps"
      ? state.at >= length ? "the end" : `step ${Math.floor(state.at + 1e-9)} of 0 to ${length - 1}`
      : `${seconds(state.at)} of ${seconds(length)}`;
  scrub.setAttribute("aria-valuetext", said);
  element("now").textContent = said;
}

/** What has been set, in every control. */
function showControls(): void {
  for (const name of ["alpha", "bandwidth", "reduction", "nbytes"] as const) {
    element<HTMLInputElement>(name).value = String(Math.log10(state[name]));
  }
  element("alpha-said").textContent = seconds(state.alpha * 1e-6);
  element("bandwidth-said").textContent = `${Number(state.bandwidth.toPrecision(3))} GB/s`;
  element("reduction-said").textContent = `${Number(state.reduction.toPrecision(3))} GB/s`;
  element("nbytes-said").textContent = bytes(state.nbytes);
  for (const name of ["alpha", "bandwidth", "reduction", "nbytes"]) {
    element(name).setAttribute("aria-valuetext", element(`${name}-said`).textContent ?? "");
  }
  for (const name of ["clock", "times", "fault", "slow", "dead"] as const) {
    element<HTMLSelectElement>(name).value = String(state[name]);
  }
  element<HTMLInputElement>("dead-step").value = String(state.deadStep);
  element("dead-step").parentElement!.hidden = state.dead < 0;
  element("play").textContent = isPlaying ? "Pause" : "Play";
  element("play").setAttribute("aria-pressed", String(isPlaying));
}

let saving = 0;
/** Change what is set, draw it, and keep it in the address. */
function change(part: Partial<State>): void {
  const isMoment = Object.keys(part).every((name) => ["at", "scene", "rank", "chunk"].includes(name));
  if (part.clock !== undefined && part.clock !== state.clock && part.at === undefined) part.at = 0;
  state = { ...state, ...part };
  if (isMoment) draw();
  else prepare();
  window.clearTimeout(saving);
  saving = window.setTimeout(() => {
    const words = write(state, initial);
    history.replaceState(null, "", words ? `#${words}` : location.pathname + location.search);
  }, 150);
}

let frame = 0;
let then = 0;
const isStill = matchMedia("(prefers-reduced-motion: reduce)");

function advance(now: number): void {
  if (!isPlaying) return;
  // The time of a frame may be before the time at which it was asked for.
  const passed = (speed * Math.max(0, now - then)) / 1000;
  const isStep = state.clock === "steps";
  const gone = isStep ? passed / STEP_SECONDS : (passed * length) / WHOLE_SECONDS;
  // Who wants no motion sees a step at a time.
  const unit = isStep ? 1 : length / Math.max(1, stages[0]!.numSteps);
  if (!isStill.matches || gone >= unit) {
    then = now;
    change({ at: Math.min(length, state.at + (isStill.matches ? unit : gone)) });
  }
  if (state.at >= length) stop();
  else frame = requestAnimationFrame(advance);
}

function play(): void {
  if (state.at >= length) change({ at: 0 });
  isPlaying = true;
  then = performance.now();
  showControls();
  frame = requestAnimationFrame(advance);
}

function stop(): void {
  isPlaying = false;
  cancelAnimationFrame(frame);
  showControls();
}

/** Go to the next step, or the one before; on the clock of time, to where the next one ends. */
function go(way: 1 | -1): void {
  stop();
  if (state.clock === "steps") {
    const whole = way > 0 ? Math.floor(state.at + 1e-9) + 1 : Math.ceil(state.at - 1e-9) - 1;
    change({ at: Math.max(0, Math.min(length, whole)) });
    return;
  }
  const marks = stages.flatMap(({ timing }) => timing.ends.flat()).filter(Number.isFinite);
  const near = length * 1e-6;
  const at =
    way > 0
      ? Math.min(length, ...marks.filter((mark) => mark > state.at + near))
      : Math.max(0, ...marks.filter((mark) => mark < state.at - near));
  change({ at });
}

function toEnd(end: boolean): void {
  stop();
  change({ at: end ? length : 0 });
}

function options(id: string, words: [string, string][]): void {
  const select = element<HTMLSelectElement>(id);
  for (const [value, text] of words) select.add(new Option(text, value));
}

/** The data stand in the page as base64 of JSON that zlib has packed. */
async function unpacked(): Promise<PageData> {
  const packed = Uint8Array.from(atob(element("data").textContent), (sign) => sign.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return (await new Response(stream).json()) as PageData;
}

async function begin(): Promise<void> {
  page = await unpacked();
  limits = {
    ranks: page.scenes[0]!.worldSize,
    steps: page.scenes[0]!.steps.length,
    faults: page.faults.length,
  };
  initial = read(new URLSearchParams(page.settings).toString(), INITIAL, limits);
  state = read(location.hash, initial, limits);
  stages = page.scenes.map((scene, number) => new Stage(scene, number));
  curves = page.curves.length > 0 ? new Curves(page.curves, element("curves")) : null;
  const ranks = page.scenes[0]!.places.map((_, rank): [string, string] => [`${rank}`, `rank ${rank}`]);
  options("slow", [["-1", "none"], ...ranks]);
  options("dead", [["-1", "none"], ...ranks]);
  options("fault", [["0", "none"], ...page.faults.map(({ title }, index): [string, string] => [`${index + 1}`, title])]);
  element("fault").parentElement!.hidden = page.faults.length === 0;
  options("times", [["model", "the sliders"], ...(page.times ? [["trace", page.times.title] as [string, string]] : [])]);
  element("times").parentElement!.hidden = page.times === null;
  element("curves").closest("section")!.hidden = curves === null;
  element("links").closest("section")!.hidden = page.network === null;
  for (const link of page.network?.links ?? []) {
    const { name, nbytes, share } = link;
    const row = element("links").appendChild(document.createElement("tr"));
    for (const words of [name, bytes(nbytes), shareInWords(link)]) row.appendChild(document.createElement("td")).textContent = words;
    const bar = row.lastElementChild as HTMLElement;
    bar.style.setProperty("--share", `${Math.round(100 * (share ?? 0))}%`);
  }
  element<HTMLInputElement>("dead-step").max = String(Math.max(0, stages[0]!.numSteps - 1));

  element("play").addEventListener("click", () => (isPlaying ? stop() : play()));
  element("back").addEventListener("click", () => go(-1));
  element("forth").addEventListener("click", () => go(1));
  element("first").addEventListener("click", () => toEnd(false));
  element("last").addEventListener("click", () => toEnd(true));
  element<HTMLSelectElement>("speed").addEventListener("change", (event) => {
    speed = Number((event.target as HTMLSelectElement).value);
  });
  element<HTMLInputElement>("scrub").addEventListener("input", (event) => {
    stop();
    change({ at: (Number((event.target as HTMLInputElement).value) * length) / 1000 });
  });
  for (const name of ["alpha", "bandwidth", "reduction", "nbytes"] as const) {
    element<HTMLInputElement>(name).addEventListener("input", (event) => {
      const value = 10 ** Number((event.target as HTMLInputElement).value);
      const share = length > 0 ? state.at / length : 0;
      change({ [name]: name === "nbytes" ? Math.round(value) : value });
      if (state.clock === "time") change({ at: share * length });
    });
  }
  for (const name of ["clock", "times"] as const) {
    element<HTMLSelectElement>(name).addEventListener("change", (event) => {
      change({ [name]: (event.target as HTMLSelectElement).value });
    });
  }
  for (const name of ["fault", "slow", "dead"] as const) {
    element<HTMLSelectElement>(name).addEventListener("change", (event) => {
      const value = Number((event.target as HTMLSelectElement).value);
      change(name === "slow" && value >= 0 ? { slow: value, clock: "time" } : { [name]: value });
    });
  }
  element<HTMLInputElement>("dead-step").addEventListener("input", (event) => {
    change({ deadStep: Number((event.target as HTMLInputElement).value) || 0 });
  });
  document.addEventListener("keydown", (event) => {
    const target = event.target as HTMLElement;
    if (event.ctrlKey || event.altKey || event.metaKey || /INPUT|SELECT/.test(target.tagName)) return;
    if (event.key === " " && target.tagName === "BUTTON") return;
    const keys: Record<string, () => void> = {
      " ": () => (isPlaying ? stop() : play()),
      ArrowLeft: () => go(-1),
      ArrowRight: () => go(1),
      Home: () => toEnd(false),
      End: () => toEnd(true),
    };
    const act = keys[event.key];
    if (act === undefined) return;
    event.preventDefault();
    act();
  });
  window.addEventListener("hashchange", () => {
    stop();
    state = read(location.hash, initial, limits);
    prepare();
  });
  window.addEventListener("resize", prepare);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", prepare);
  prepare();
  if (page.settings["playing"] === "1") play();
  document.body.dataset["ready"] = "1";
}

void begin();
