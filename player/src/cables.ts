/** The network of a simulated run: its links, how full they get, and those that carry something at the moment. */
import { select, type Selection } from "d3-selection";
import type { NetworkData } from "./data";
import type { Film, Message } from "./film";
import { curve, frame, RADIUS, spread } from "./network";
import { bytes, plural } from "./words";

const FONT = 18; // of names that fit
const THIN = 1.5;
const WIDE = 12; // a link that is full all the time

type LinkData = NetworkData["links"][number];

export function shareInWords({ share }: LinkData): string {
  return share === null ? "-" : `${Math.round(100 * share)} %`;
}

export class Cables {
  private readonly links: Selection<SVGPathElement, LinkData, SVGGElement, unknown>;
  /** Of each link the chunks that it carries, in all steps and before each step. */
  private readonly carried: number[][];
  private drawnOf = "";

  constructor(
    private readonly network: NetworkData,
    film: Film,
    parent: HTMLElement,
  ) {
    const { links, switches } = network;
    const places = spread(network.places);
    const numRanks = places.length - switches.length;
    const root = select(parent)
      .append("svg")
      .attr("viewBox", frame(places))
      .attr("role", "img")
      .attr("aria-label", this.inWords(numRanks));
    this.links = root
      .append("g")
      .selectAll<SVGPathElement, LinkData>("path")
      .data(links)
      .join("path")
      .attr("class", "load")
      .attr("d", ({ source, target }) => curve(places[source]!, places[target]!));
    this.links.append("title").text((link) => `${link.name}: ${bytes(link.nbytes)}, used ${shareInWords(link)}`);
    const nodes = root
      .append("g")
      .selectAll<SVGGElement, [number, number]>("g")
      .data(places)
      .join("g")
      .attr("transform", ([x, y]) => `translate(${x} ${y})`);
    nodes
      .append("rect")
      .attr("class", "rank")
      .attr("x", -RADIUS)
      .attr("y", -RADIUS)
      .attr("width", 2 * RADIUS)
      .attr("height", 2 * RADIUS)
      .attr("rx", (_, node) => (node < numRanks ? RADIUS : 6));
    const words = (node: number): string => (node < numRanks ? `${node}` : switches[node - numRanks]!);
    nodes
      .append("text")
      .style("font-size", (_, node) => `${Math.min(FONT, (2 * RADIUS) / (0.6 * words(node).length))}px`)
      .text((_, node) => words(node));
    this.carried = links.map(() => [0]);
    for (const messages of film.steps) {
      for (const counts of this.carried) counts.push(counts.at(-1)!);
      for (const message of messages) {
        for (const link of this.routeOf(message)) this.carried[link]![this.carried[link]!.length - 1]! += message.numChunks;
      }
    }
  }

  /** Draw the links at the beginning of a step, and mark those on the ways of messages. */
  draw(step: number, moving: Message[]): void {
    const busy = new Set(moving.flatMap((message) => this.routeOf(message)));
    const key = `${step} ${[...busy].join()}`;
    if (key === this.drawnOf) return;
    this.drawnOf = key;
    this.links
      .classed("busy", (_, link) => busy.has(link))
      .attr("stroke-width", ({ share }, link) => {
        const counts = this.carried[link]!;
        return THIN + (WIDE - THIN) * ((share ?? 0) * (counts[Math.min(step, counts.length - 1)]! / (counts.at(-1)! || 1)));
      });
  }

  private routeOf({ source, target }: Message): number[] {
    return this.network.routes[`${source} ${target}`] ?? [];
  }

  private inWords(numRanks: number): string {
    const { name, links, switches } = this.network;
    const parts = [plural(numRanks, "rank"), ...(switches.length > 0 ? [`${switches.length} switch${switches.length === 1 ? "" : "es"}`] : [])];
    const fullest = links[0] === undefined ? "" : `; the fullest link, ${links[0].name}, is used ${shareInWords(links[0])}`;
    return `the network ${name}: ${parts.join(", ")}${fullest}`;
  }
}
