/** Ranks at their places, messages on their way, and how much each link has carried. */
import { select, type Selection } from "d3-selection";
import type { Film, Message } from "./film";
import { messageInWords, plural } from "./words";

export const RADIUS = 26;
const APART = 100; // between neighbours
const NEAR = 72; // between the nearest of many ranks, so that their numbers can be read
const MANY = 16;
const LABEL = 0.4; // of the way, so that the labels of both ways stand apart
const MOST_ANIMATED = 256;
const MOST_LABELS = 32;
const MOST_LOADS = 512; // of all pairs, the links that have carried the most
const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#999999"];

export type Point = [number, number];

export function colourOf(chunk: number): string {
  return COLOURS[chunk % COLOURS.length]!;
}

/** Places in pixels: neighbours, or the nearest of many nodes, at a distance at which numbers can be read. */
export function spread(places: Point[]): Point[] {
  let least = Infinity;
  places.forEach(([x, y], index) => {
    for (const [otherX, otherY] of places.slice(0, index)) {
      least = Math.min(least, Math.hypot(x - otherX, y - otherY));
    }
  });
  const apart = places.length <= MANY ? Math.max(APART, NEAR / least) : NEAR / least;
  return places.map(([x, y]) => [x * apart, y * apart]);
}

/** The part of the plane that shows all places, for `viewBox`. */
export function frame(places: Point[]): string {
  const xs = places.map(([x]) => x);
  const ys = places.map(([, y]) => y);
  const [left, top] = [Math.min(...xs) - 55, Math.min(...ys) - 55];
  return [left, top, Math.max(...xs) + 55 - left, Math.max(...ys) + 55 - top].join(" ");
}

/** Begin, middle and end of a way between two nodes: bent to the right, so that those of both ways lie apart. */
export function bent([x, y]: Point, [toX, toY]: Point): [Point, Point, Point] {
  const length = Math.hypot(toX - x, toY - y) || 1;
  const [alongX, alongY] = [(toX - x) / length, (toY - y) / length];
  const middle: Point = [(x + toX) / 2 + alongY * 0.1 * length, (y + toY) / 2 - alongX * 0.1 * length];
  const edge = RADIUS + 8;
  return [
    [x + alongX * edge, y + alongY * edge],
    middle,
    [toX - alongX * edge, toY - alongY * edge],
  ];
}

/** What `bent` says, as a path. */
export function curve(from: Point, to: Point): string {
  const [begin, middle, end] = bent(from, to);
  return `M${begin} Q${middle} ${end}`;
}

export class Network {
  private readonly places: Point[];
  private readonly root: Selection<SVGSVGElement, unknown, null, undefined>;
  private readonly loads: Selection<SVGGElement, unknown, null, undefined>;
  private readonly arrows: Selection<SVGGElement, unknown, null, undefined>;
  private readonly ranks: Selection<SVGGElement, Point, SVGGElement, unknown>;
  private readonly labels: Selection<SVGGElement, unknown, null, undefined>;
  private readonly parcels: Selection<SVGGElement, unknown, null, undefined>;
  private arrowsOf = "";
  private loadsOf = -1;

  constructor(
    private readonly film: Film,
    parent: HTMLElement,
    private readonly id: string,
  ) {
    const { places, worldSize, name, collective, layout } = film.scene;
    this.places = spread(places);
    this.root = select(parent)
      .append("svg")
      .attr("viewBox", frame(this.places))
      .attr("role", "img")
      .attr("aria-label", `${name} ${collective} on ${plural(worldSize, "rank")}, drawn as a ${layout}`);
    const heads = this.root.append("defs");
    for (const kind of ["add", "move"]) {
      heads
        .append("marker")
        .attr("id", `${id}${kind}`)
        .attr("viewBox", "0 0 10 10")
        .attr("refX", 9)
        .attr("refY", 5)
        .attr("markerWidth", 5)
        .attr("markerHeight", 5)
        .attr("orient", "auto")
        .append("path")
        .attr("d", "M0 0 L10 5 L0 10 z")
        .attr("class", `${kind}head`);
    }
    this.loads = this.root.append("g");
    this.arrows = this.root.append("g");
    this.ranks = this.root
      .append("g")
      .selectAll<SVGGElement, Point>("g")
      .data(this.places)
      .join("g")
      .attr("transform", ([x, y]) => `translate(${x} ${y})`);
    this.ranks.append("circle").attr("r", RADIUS).attr("class", "rank");
    // What a rank holds, as an arc around it.
    this.ranks
      .append("circle")
      .attr("r", RADIUS + 4)
      .attr("class", "share")
      .attr("pathLength", 1)
      .attr("transform", "rotate(-90)");
    this.ranks.append("text").text((_, rank) => rank);
    this.parcels = this.root.append("g");
    this.labels = this.root.append("g");
  }

  /** Draw a step; `fractions` says how far each of its messages has come, NaN if it is not on its way. */
  draw(step: number, messages: Message[], fractions: number[], after: number[], marks: { bad: number | null; dead: number | null }): void {
    const shown = messages.filter((_, index) => !Number.isNaN(fractions[index]!));
    const key = `${step}:${shown.map(({ source, target, step: of }) => `${of}.${source}.${target}`).join()}`;
    if (key !== this.arrowsOf) {
      this.arrowsOf = key;
      this.drawArrows(shown);
    }
    this.drawParcels(messages, fractions);
    if (step !== this.loadsOf) {
      this.loadsOf = step;
      this.drawLoads(step);
    }
    const nodes = this.ranks.nodes();
    nodes.forEach((node, rank) => {
      const arc = node.childNodes[1] as SVGCircleElement;
      const share = this.film.share(rank, after[rank]!);
      const dashes = `${share} 2`;
      if (arc.getAttribute("stroke-dasharray") !== dashes) arc.setAttribute("stroke-dasharray", dashes);
      node.classList.toggle("bad", rank === marks.bad);
      node.classList.toggle("dead", rank === marks.dead);
    });
  }

  private drawArrows(messages: Message[]): void {
    this.arrows
      .selectAll<SVGPathElement, Message>("path")
      .data(messages)
      .join((enter) => {
        const path = enter.append("path");
        path.append("title");
        return path;
      })
      .attr("d", ({ source, target }) => curve(this.places[source]!, this.places[target]!))
      .attr("class", ({ isReduced }) => (isReduced ? "add" : "move"))
      .attr("marker-end", ({ isReduced }) => `url(#${this.id}${isReduced ? "add" : "move"})`)
      .select("title")
      .text(messageInWords);
    this.labels
      .selectAll<SVGTextElement, Message>("text")
      .data(messages.length <= MOST_LABELS ? messages : [])
      .join("text")
      .attr("class", "label")
      .attr("transform", (message) => `translate(${this.along(message, LABEL)})`)
      .text(({ chunks, isReduced }) => (isReduced ? "+" : "") + chunks);
  }

  private drawParcels(messages: Message[], fractions: number[]): void {
    const moving = messages
      .map((message, index) => ({ message, fraction: fractions[index]! }))
      .filter(({ fraction }) => fraction > 0 && fraction < 1)
      .slice(0, MOST_ANIMATED);
    this.parcels
      .selectAll<SVGRectElement, (typeof moving)[number]>("rect")
      .data(moving)
      .join("rect")
      .attr("x", -8)
      .attr("y", -8)
      .attr("width", 16)
      .attr("height", 16)
      .attr("rx", 4)
      .attr("fill", ({ message }) => colourOf(parseInt(message.chunks, 10) || 0))
      .attr("transform", ({ message, fraction }) => `translate(${this.along(message, fraction)})`);
  }

  /** Lines under the arrows: the wider, the more chunks have gone this way in the steps before. */
  private drawLoads(step: number): void {
    const loads = new Map<string, { source: number; target: number; chunks: number; messages: number }>();
    let most = 1;
    for (const message of this.film.steps.slice(0, step).flat()) {
      const { source, target, numChunks } = message;
      const key = `${source} ${target}`;
      const load = loads.get(key) ?? { source, target, chunks: 0, messages: 0 };
      load.chunks += numChunks;
      load.messages++;
      loads.set(key, load);
      most = Math.max(most, load.chunks);
    }
    this.loads
      .selectAll<SVGPathElement, { source: number; target: number; chunks: number; messages: number }>("path")
      .data([...loads.values()].sort((one, other) => other.chunks - one.chunks).slice(0, MOST_LOADS))
      .join((enter) => {
        const path = enter.append("path");
        path.append("title");
        return path;
      })
      .attr("class", "load")
      .attr("stroke-width", ({ chunks }) => 1 + (9 * chunks) / most)
      .attr("d", ({ source, target }) => curve(this.places[source]!, this.places[target]!))
      .select("title")
      .text(
        ({ source, target, chunks, messages }) =>
          `rank ${source} to rank ${target}: ${plural(messages, "message")}, ${plural(chunks, "chunk")}`,
      );
  }

  private along(message: Message, share: number): Point {
    const [begin, middle, end] = bent(this.places[message.source]!, this.places[message.target]!);
    const at = (axis: 0 | 1): number =>
      (1 - share) ** 2 * begin[axis] + 2 * share * (1 - share) * middle[axis] + share ** 2 * end[axis];
    return [at(0), at(1)];
  }
}
